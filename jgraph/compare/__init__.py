"""Two programs side by side: times in turns, host time, memory, capture, and the equality of their results."""
