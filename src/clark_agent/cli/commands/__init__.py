"""The commands. Each module is imported when one of its commands is used."""
