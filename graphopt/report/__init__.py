"""What a compiled step says about itself: tables, explanations, HTML."""
