"""What contestants do in their turns. Each module has prepare(library, parameters) -> contestant.Work."""
