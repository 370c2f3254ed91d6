"""The words of the games, by category. Every fourth word of a category is held out."""

CATEGORIES = {
    "animal": "dog cat horse elephant shark eagle snake frog bee spider whale monkey rabbit penguin tiger owl",
    "food": "bread cheese apple banana soup pizza chocolate egg rice honey carrot lemon cake salad butter potato",
    "instrument": "piano violin drum guitar trumpet flute harp organ",
    "vehicle": "car bicycle train airplane boat truck rocket bus helicopter submarine ambulance tractor",
    "building": "castle school hospital church library prison hotel museum factory farm theater bank",
    "nature": "river mountain desert forest ocean island volcano lake cave beach waterfall glacier",
    "weather": "rain snow storm wind fog lightning rainbow cloud",
    "job": "doctor teacher farmer soldier pilot chef painter singer lawyer dentist firefighter judge",
    "clothing": "hat shoe glove scarf coat sock belt dress",
    "tool": "hammer knife scissors needle shovel ladder broom saw",
    "furniture": "chair bed table lamp mirror sofa desk clock",
    "body": "eye hand heart tooth nose brain hair knee",
    "sport": "football tennis swimming boxing skiing golf chess hockey",
    "object": "book candle key umbrella camera telephone balloon wallet",
    "sky": "sun moon star planet",
    "material": "gold wood glass paper iron wool leather diamond",
}
HELD_OUT = [word for words in CATEGORIES.values() for word in words.split()[3::4]]
TRAINING = [word for words in CATEGORIES.values() for word in words.split() if word not in HELD_OUT]
