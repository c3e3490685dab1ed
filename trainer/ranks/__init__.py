"""Learn in several processes: start them, join them, and exchange what all of them must know."""
