"""Shows schedules and the command buffers of compiled programs before they run."""
