"""What a job file may say, schedules among it; where it is wrong, with file and line."""
