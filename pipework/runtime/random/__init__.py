"""Random numbers that do not depend on stages, schedules and threads."""
