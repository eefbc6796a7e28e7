"""The closed vocabulary of the demo model: names, words and the table of facts.

Everything the model can know about the world is written here; what is not here it has to copy from the prompt.
"""
# ruff: noqa: SIM905  (two hundred words are easier to read as one text)

NAMES = (
    "Anna Ben Clara David Emma Felix Greta Henry Ida Jonas Kim Lena Max Nora Oscar Paula Quinn Rosa Sam Tina Umar Vera "
    "Will Xenia Yara Zoe Alice Bob Carol Daniel Eve Frank Grace Hugo Iris Jack Kate Liam Mia Noah Olivia Peter Ruth "
    "Simon Tom Victor Wendy Leo Maria Nina Omar Priya Ravi Sofia Theo Amir Chen Diego Elif Fatima"
).split()

WORDS = (
    "apple river moon stone house tree bird cloud table chair window garden music paper water fire wind snow rain sun "
    "star night day summer winter spring autumn road bridge train boat plane car bus bike book pen lamp door key clock "
    "cup plate spoon bread cheese milk honey sugar salt rice soup cake lemon orange cherry grape peach plum pear melon "
    "dog cat horse cow sheep goat pig duck goose hen fox wolf bear lion tiger mouse rabbit frog fish whale shark snake "
    "bee ant spider owl eagle red blue green yellow black white brown pink gold silver small big tall short long fast "
    "slow warm cold soft hard light dark old new young happy sad quiet loud kind brave clever forest mountain lake sea "
    "island beach field hill valley city village market school castle tower farm king queen friend child doctor baker "
    "sailor singer dance song story letter word name number one two three four five six seven eight nine ten hello "
    "world open close run walk jump sing read write draw paint build find give take make good morning evening ship "
    "hat coat shoe glove ring coin box bag rope drum bell flag map wheel glass wood iron leaf root seed flower grass "
    "alpha beta gamma delta robot rocket planet laser tensor cache token model server"
).split()

ANIMALS = (
    "cat dog fox bear mouse rabbit owl frog horse duck lion wolf sheep goat turtle dragon penguin squirrel".split()
)
PLACES = "forest garden village castle valley lake mountain farm island city beach market".split()
JOBS = "baker doctor teacher sailor singer farmer painter nurse pilot cook gardener writer driver engineer".split()
HOBBIES = "music chess football reading cooking dancing swimming painting running cycling hiking singing".split()
COLORS = "red blue green yellow black white brown pink orange silver".split()
ITEMS = "chair table lamp book cup bag coat hat bike clock plate pen box rope drum bell map shoe".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
EVENTS = "concert meeting party dinner lesson match exam show walk wedding".split()
CONDITIONS = "sunny cloudy rainy windy snowy foggy stormy clear".split()

CAPITALS = dict(
    pair.split("=")
    for pair in (
        "France=Paris,Germany=Berlin,Italy=Rome,Spain=Madrid,Portugal=Lisbon,Austria=Vienna,Switzerland=Bern,"
        "Belgium=Brussels,Netherlands=Amsterdam,Denmark=Copenhagen,Sweden=Stockholm,Norway=Oslo,Finland=Helsinki,"
        "Iceland=Reykjavik,Ireland=Dublin,England=London,Scotland=Edinburgh,Poland=Warsaw,Hungary=Budapest,"
        "Greece=Athens,Bulgaria=Sofia,Romania=Bucharest,Croatia=Zagreb,Serbia=Belgrade,Ukraine=Kyiv,Turkey=Ankara,"
        "Egypt=Cairo,Morocco=Rabat,Kenya=Nairobi,Ethiopia=Addis Ababa,Nigeria=Abuja,Ghana=Accra,Senegal=Dakar,"
        "China=Beijing,Japan=Tokyo,South Korea=Seoul,India=New Delhi,Nepal=Kathmandu,Pakistan=Islamabad,Iran=Tehran,"
        "Iraq=Baghdad,Thailand=Bangkok,Vietnam=Hanoi,Indonesia=Jakarta,Malaysia=Kuala Lumpur,Philippines=Manila,"
        "Australia=Canberra,New Zealand=Wellington,Canada=Ottawa,Mexico=Mexico City,Cuba=Havana,Brazil=Brasilia,"
        "Argentina=Buenos Aires,Chile=Santiago,Peru=Lima,Colombia=Bogota,Ecuador=Quito,Uruguay=Montevideo,"
        "United States=Washington,Russia=Moscow"
    ).split(",")
)

CONTINENTS = {
    "Europe": list(CAPITALS)[:25],
    "Africa": list(CAPITALS)[26:33],
    "Asia": list(CAPITALS)[33:46],
    "North America": ["Canada", "Mexico", "Cuba", "United States"],
    "South America": ["Brazil", "Argentina", "Chile", "Peru", "Colombia", "Ecuador", "Uruguay"],
}

CITIES = (
    [city for city in CAPITALS.values() if " " not in city]
    + (
        "Munich Hamburg Milan Naples Venice Barcelona Porto Zurich Geneva Lyon Boston Chicago Dallas Denver Seattle "
        "Miami Toronto Sydney Osaka Mumbai Delhi Shanghai Dubai Lagos"
    ).split()
    + ["New York", "San Francisco", "Hong Kong", "Cape Town"]
)

OPPOSITES = dict(
    pair.split("=")
    for pair in (
        "hot=cold,big=small,tall=short,fast=slow,happy=sad,old=young,day=night,light=dark,hard=soft,open=closed,"
        "wet=dry,full=empty,loud=quiet,rich=poor,strong=weak,left=right,up=down,early=late,clean=dirty,near=far,"
        "thick=thin,high=low,good=bad,black=white,win=lose,push=pull,first=last,always=never,true=false,buy=sell"
    ).split(",")
)
SOUNDS = dict(
    pair.split("=")
    for pair in (
        "cat=meow,dog=woof,cow=moo,sheep=baa,pig=oink,duck=quack,horse=neigh,lion=roar,frog=ribbit,bee=buzz,"
        "mouse=squeak,snake=hiss,owl=hoot,rooster=cock-a-doodle-doo"
    ).split(",")
)
YOUNG = dict(
    pair.split("=")
    for pair in (
        "dog=puppy,cat=kitten,cow=calf,sheep=lamb,horse=foal,pig=piglet,duck=duckling,hen=chick,bear=cub,goat=kid,"
        "goose=gosling,frog=tadpole,swan=cygnet"
    ).split(",")
)
PLURALS = dict(
    pair.split("=")
    for pair in (
        "mouse=mice,goose=geese,child=children,foot=feet,tooth=teeth,man=men,woman=women,person=people,leaf=leaves,"
        "wolf=wolves,knife=knives,sheep=sheep"
    ).split(",")
)
LEGS = {
    "cat": 4, "dog": 4, "horse": 4, "cow": 4, "spider": 8, "ant": 6, "bee": 6, "duck": 2, "hen": 2, "snake": 0,
    "crab": 10, "fish": 0,
}  # fmt: skip
SYMBOLS = {
    "gold": "Au", "silver": "Ag", "iron": "Fe", "oxygen": "O", "hydrogen": "H", "carbon": "C", "helium": "He",
    "copper": "Cu", "lead": "Pb", "tin": "Sn",
}  # fmt: skip
THING_COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "coal": "black", "blood": "red",
    "an orange": "orange", "a lemon": "yellow", "milk": "white", "the sea": "blue", "a tomato": "red",
    "chocolate": "brown",
}  # fmt: skip
QUANTITIES = {
    "days": {"a week": 7, "a year": 365, "January": 31, "June": 30},
    "hours": {"a day": 24},
    "minutes": {"an hour": 60},
    "seconds": {"a minute": 60},
    "months": {"a year": 12},
    "weeks": {"a year": 52},
    "years": {"a century": 100, "a decade": 10},
    "letters": {"the alphabet": 26},
    "sides": {"a triangle": 3, "a square": 4, "a hexagon": 6},
    "planets": {"the solar system": 8},
    "strings": {"a violin": 4, "a guitar": 6},
    "players": {"a football team": 11},
}
ONE_OFF = {
    "the largest planet": "Jupiter", "the red planet": "Mars", "the planet closest to the sun": "Mercury",
    "the largest ocean": "the Pacific", "the longest river": "the Nile", "the highest mountain": "Mount Everest",
    "the largest animal": "the blue whale", "the fastest land animal": "the cheetah",
    "the tallest animal": "the giraffe",
    "the first month of the year": "January", "the last month of the year": "December",
    "the first day of the week": "Monday", "the coldest season": "winter", "the warmest season": "summer",
    "the first letter of the alphabet": "A", "the last letter of the alphabet": "Z",
    "the author of Hamlet": "Shakespeare",
    "the painter of the Mona Lisa": "Leonardo da Vinci", "the largest country": "Russia",
    "the freezing point of water": "0 degrees",
    "the boiling point of water": "100 degrees", "the smallest prime number": "2", "frozen water": "ice",
}  # fmt: skip

SYLLABLES = (
    "ba be bi bo da de di do fa fi ga go ka ke ki ko la le li lo ma mi mo na ne no pa pi po ra re ri ro sa se si so "
    "ta te ti to va vi zo zu"
).split()

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a friendly assistant.",
    "You are the demo model of nanoserve.",
    "Answer briefly.",
    "Be concise.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a helpful, harmless and honest assistant.",
    "You are a small test model. Be polite.",
)
