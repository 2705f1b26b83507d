"""Other systems, measured beside ours when they are installed. Never a dependency."""
