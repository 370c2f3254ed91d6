"""Settings: their schema, reading and checking them, and deriving the arguments of a trainer."""
