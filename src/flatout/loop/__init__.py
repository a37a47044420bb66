"""The library for users who write their own training loop: `flatout.Loop` and its parts."""
