"""Settings: what they are, how they are read, and which arguments of a trainer follow from them."""
