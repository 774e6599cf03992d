"""What runs beside what in one step, from the traces of --profile; `python -m toolkits.timeline` draws it."""
