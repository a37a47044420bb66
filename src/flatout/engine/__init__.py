"""Room 2: applies a Plan to a Scene in one order, and guards it. It is handed the lever table and imports no lever."""
