"""What happens in a run. Private: import `run` and its companions from `clark_agent`.

loop        turns until the model is done, follow-ups until there are none
turn        transforms → gates → request → stream
batch       the tool calls of one answer
run         what a run is made of
"""
