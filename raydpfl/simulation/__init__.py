"""The rounds of a run: plan, coordinator, schedule, clients, records and checkpoints."""
