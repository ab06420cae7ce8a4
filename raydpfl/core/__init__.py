"""What everything else stands on: random numbers, exact sums, messages, compiled code."""
