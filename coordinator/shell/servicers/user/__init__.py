"""JobService and OperatorService: what users and operators say."""
