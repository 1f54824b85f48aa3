"""The reports' own figures, each computed from configurations and set beside what a report says."""
