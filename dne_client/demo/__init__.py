"""Tell the whole story on real digits, with the commands and over HTTP as anyone would."""
