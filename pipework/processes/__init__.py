"""A pipe whose stages live in several processes: what travels between them, who is alive, and what all agree on."""
