"""What runs in the sandbox's own processes. Imports the standard library only: helpers start without the package."""
