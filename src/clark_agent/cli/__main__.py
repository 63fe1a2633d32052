"""``python -m clark_agent.cli``."""

from clark_agent.cli import main

if __name__ == "__main__":
    main()
