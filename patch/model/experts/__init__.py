"""Mixture-of-experts layers: router, dispatcher, shared and grouped experts."""
