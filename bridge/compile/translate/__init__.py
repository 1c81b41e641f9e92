"""Translation: Relax to loop IR, one function per Relax operator."""
