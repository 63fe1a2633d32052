"""``python -m clark_agent``, the same as ``clark-agent``."""

from clark_agent.cli import main

if __name__ == "__main__":
    main()
