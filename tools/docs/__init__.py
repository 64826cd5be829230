"""What the documentation site is made with: its hooks, its pictures and its gallery."""
