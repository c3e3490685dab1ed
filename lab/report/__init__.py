"""Report on comparisons: metrics, tables, plots, and the page that holds them."""
