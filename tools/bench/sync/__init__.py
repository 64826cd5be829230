"""The modes of `sync` side by side, and against one process."""
