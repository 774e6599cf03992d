"""What runs beside what in one step, from the traces of --profile; `llama-patch timeline` draws it."""
