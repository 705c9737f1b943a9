"""Figures and tables of a workflow, where they would hide its steps."""
