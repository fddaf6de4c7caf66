"""Run directories to tables, figures, a page and a summary. Needs the `report` extra (matplotlib, jinja2)."""
