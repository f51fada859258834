"""Schedules as CSV, JSON and text."""
