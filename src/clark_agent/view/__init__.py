"""A page to look at runs, in a browser: `clark_agent.view.app.view_app`, and ``clark-agent view``.

It opens on any store. It needs the extra ``view``, which is loaded when an app is made.
"""
