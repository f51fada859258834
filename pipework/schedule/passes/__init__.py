"""Passes: functions from one schedule to another."""
