"""One file per table or figure of the papers: records in, data frames out."""
