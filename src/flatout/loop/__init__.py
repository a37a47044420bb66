"""The library for people who own their loop: `flatout.Loop` and what it stands on."""
