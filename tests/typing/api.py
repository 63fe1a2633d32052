"""The public API as a user's type checker sees it: this file must check without an error.

It is never run.
"""

from typing import assert_type

import clark_agent

assert_type(clark_agent.__version__, str)
