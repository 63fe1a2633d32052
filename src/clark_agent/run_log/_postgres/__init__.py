"""The parts of `clark_agent.run_log.postgres`. They need the extra ``postgres``, and are imported
when a store is created.
"""
