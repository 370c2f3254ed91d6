"""What task families that run Python programs share."""
