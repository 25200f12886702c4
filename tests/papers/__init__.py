"""The papers' tables, figures and numbers, under the papers' own labels."""
