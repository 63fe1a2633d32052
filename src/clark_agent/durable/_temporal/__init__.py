"""The inside of `clark_agent.durable.temporal`."""
