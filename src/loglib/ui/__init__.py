"""UI: a page in a browser for a directory of topics: `loglib ui` (extra `ui`).

The facts of the page are plain functions of topics that are open for reading. They return dataclasses that JSON can
hold, and know no server.
"""
