"""What simulations measured: metrics, comparison tables, and an HTML report with charts."""
