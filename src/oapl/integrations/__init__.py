"""The method inside the trainers that people already have. Each is thin: its mathematics is that of `oapl.losses`."""
