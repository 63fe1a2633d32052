"""Mistakes that a type checker must catch.

Each line marked `# E: <code>` must be reported by mypy with that error code, and nothing
else may be. It is never run.
"""

import clark_agent

version: int = clark_agent.__version__  # E: assignment
clark_agent.no_such_name  # E: attr-defined
