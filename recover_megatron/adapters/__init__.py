"""Translators from a host framework's buffers and schedule to the three layers' words."""
