from trainyard.channel import OPTIONS as OPTIONS
from trainyard.channel import connect as connect
