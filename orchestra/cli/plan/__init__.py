"""The other things that `orchestra plan` does, a module for each option, and how they are shown."""
