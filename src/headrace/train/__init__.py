"""Trains models of the family: update rules, schedules, balance of the experts, stability."""
