"""Runs in workflow engines, which deliver a run to a worker at least once.

`clark_agent.durable.dbos` is for DBOS, `clark_agent.durable.temporal` for Temporal. The log of a
run is its journal: an engine only says which run to continue, and when.
"""
