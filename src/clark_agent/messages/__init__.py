"""Work on messages: JSON, views of a transcript, estimates, reasoning, thinking tags, summaries."""
