"""Values that leave a process or cross a stage boundary: taken apart, written as JSON, put together again."""
