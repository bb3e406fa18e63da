/* A libnvidia-ml.so.1 for machines without a GPU: it answers the NVML calls that nvidia-ml-py makes for tocsin.
 *
 * What it says stands in the ini file named by $TOCSIN_FAKE_NVML, read again whenever that file is replaced, so a fault
 * can be made while the reader runs:
 *
 *     [node]  count = 2, driver_version = 570.86, hang_s = 30, error.nvmlInitWithFlags = 9
 *     [gpu0]  sm_clock_mhz = 1080, clocks_event_reasons = 0x8, error.nvmlDeviceGetTemperature = 15
 *
 * `error.<function>` makes that function return that NVML code: for one GPU, or under [node] for all. `hang_s` blocks
 * every call for so many seconds, or until the line is gone: a driver that hangs.
 *
 * The names and types are NVML's public ABI, as nvidia-ml-py (ctypes) declares them; there is no nvml.h to include.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define PUBLIC __attribute__((visibility("default")))
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { GPUS_MAX = 16, LINES_MAX = 512, WORD_MAX = 96 };
enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEM, CLOCK_VIDEO, CLOCK_TYPES };

typedef int nvmlReturn_t;
typedef struct gpu { int index; } *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

struct line { char section[16], key[WORD_MAX], value[WORD_MAX]; };

static struct gpu gpus[GPUS_MAX];
static struct line lines[LINES_MAX];
static int line_count;
static struct stat seen;
static int users; /* nvmlInit calls without their nvmlShutdown */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void read_lines(FILE *file)
{
    char text[2 * WORD_MAX], section[16] = "";
    line_count = 0;
    while (line_count < LINES_MAX && fgets(text, sizeof text, file)) {
        struct line *line = &lines[line_count];
        if (sscanf(text, " [%15[^]]]", section) == 1)
            continue;
        if (sscanf(text, " %95[^= ] = %95[^\n]", line->key, line->value) == 2) {
            memcpy(line->section, section, sizeof section);
            line_count++;
        }
    }
}

/* Read the file when it is not the one read before. The caller holds the lock. */
static void refresh(void)
{
    const char *path = getenv("TOCSIN_FAKE_NVML");
    struct stat now;
    if (!path || stat(path, &now) != 0)
        return;
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    read_lines(file);
    seen = now;
    fclose(file);
}

/* Copy the value of a key into `out`; 0 when the file has none. */
static int text_of(const char *section, const char *key, char out[WORD_MAX])
{
    int found = 0;
    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < line_count; i++)
        if (strcmp(lines[i].section, section) == 0 && strcmp(lines[i].key, key) == 0) {
            memcpy(out, lines[i].value, WORD_MAX);
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static unsigned long long number_of(const char *section, const char *key, unsigned long long otherwise)
{
    char text[WORD_MAX];
    return text_of(section, key, text) ? strtoull(text, NULL, 0) : otherwise;
}

static void hang(void)
{
    const struct timespec slice = {0, 50 * 1000 * 1000};
    for (unsigned long long slices = 0; slices < 20 * number_of("node", "hang_s", 0); slices++)
        nanosleep(&slice, NULL);
}

static const char *section_of(nvmlDevice_t device)
{
    static const char *const names[GPUS_MAX] = {"gpu0", "gpu1", "gpu2",  "gpu3",  "gpu4",  "gpu5",  "gpu6",  "gpu7",
                                                "gpu8", "gpu9", "gpu10", "gpu11", "gpu12", "gpu13", "gpu14", "gpu15"};
    return names[device->index];
}

/* What every call does first: hang when told to, then fail when told to. */
static nvmlReturn_t enter(const char *function)
{
    char key[WORD_MAX];
    hang();
    snprintf(key, sizeof key, "error.%s", function);
    return (nvmlReturn_t)number_of("node", key, SUCCESS);
}

static nvmlReturn_t enter_device(nvmlDevice_t device, const char *function)
{
    char key[WORD_MAX];
    nvmlReturn_t code = enter(function);
    if (code != SUCCESS)
        return code;
    if (users == 0)
        return UNINITIALIZED;
    if (device < gpus || device >= gpus + GPUS_MAX)
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "error.%s", function);
    return (nvmlReturn_t)number_of(section_of(device), key, SUCCESS);
}

#define ENTER_DEVICE(device)                                         \
    do {                                                             \
        nvmlReturn_t code_ = enter_device(device, __func__);         \
        if (code_ != SUCCESS)                                        \
            return code_;                                            \
    } while (0)

static nvmlReturn_t put_text(char *out, unsigned int length, const char *text)
{
    if (strlen(text) + 1 > length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static nvmlReturn_t put_device_text(nvmlDevice_t device, const char *key, const char *form, char *out, unsigned int length)
{
    char text[WORD_MAX];
    if (!text_of(section_of(device), key, text))
        snprintf(text, sizeof text, form, device->index);
    return put_text(out, length, text);
}

PUBLIC nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    nvmlReturn_t code = enter(__func__);
    if (code == SUCCESS) {
        pthread_mutex_lock(&lock);
        for (int i = 0; i < GPUS_MAX; i++)
            gpus[i].index = i;
        users++;
        pthread_mutex_unlock(&lock);
    }
    return code;
}

PUBLIC nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

PUBLIC nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = users > 0 ? SUCCESS : UNINITIALIZED;
    if (users > 0)
        users--;
    pthread_mutex_unlock(&lock);
    return code;
}

PUBLIC const char *nvmlErrorString(nvmlReturn_t code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}

PUBLIC nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    char text[WORD_MAX] = "570.86.15";
    nvmlReturn_t code = enter(__func__);
    if (code != SUCCESS)
        return code;
    text_of("node", "driver_version", text);
    return put_text(version, length, text);
}

PUBLIC nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t code = enter(__func__);
    if (code != SUCCESS)
        return code;
    unsigned long long told = number_of("node", "count", 0);
    *count = told > GPUS_MAX ? GPUS_MAX : (unsigned int)told;
    return users ? SUCCESS : UNINITIALIZED;
}

PUBLIC nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    if (index >= number_of("node", "count", 0) || index >= GPUS_MAX)
        return INVALID_ARGUMENT;
    ENTER_DEVICE(&gpus[index]);
    *device = &gpus[index];
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ENTER_DEVICE(device);
    *index = (unsigned int)device->index;
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER_DEVICE(device);
    return put_device_text(device, "name", "NVIDIA H100 80GB HBM3", name, length);
}

PUBLIC nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER_DEVICE(device);
    return put_device_text(device, "uuid", "GPU-00000000-0000-0000-0000-%012d", uuid, length);
}

PUBLIC nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    ENTER_DEVICE(device);
    memset(info, 0, sizeof *info);
    info->bus = (unsigned int)number_of(section_of(device), "pci_bus", 0x10 + 0x10u * (unsigned int)device->index);
    info->pciDeviceId = 0x233010de;
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", info->bus & 0xff);
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus & 0xff);
    return SUCCESS;
}

static nvmlReturn_t clock_of(nvmlDevice_t device, int type, const char *suffix, unsigned int *mhz)
{
    static const char *const names[CLOCK_TYPES] = {"graphics", "sm", "mem", "video"};
    static const unsigned int usual[CLOCK_TYPES] = {1980, 1980, 2619, 1545};
    char key[WORD_MAX];
    if (type < 0 || type >= CLOCK_TYPES)
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%s_clock_mhz%s", names[type], suffix);
    *mhz = (unsigned int)number_of(section_of(device), key, usual[type]);
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned int *mhz)
{
    ENTER_DEVICE(device);
    return clock_of(device, type, "", mhz);
}

PUBLIC nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned int *mhz)
{
    ENTER_DEVICE(device);
    return clock_of(device, type, "_max", mhz);
}

PUBLIC nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(device);
    *reasons = number_of(section_of(device), "clocks_event_reasons", 0);
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(device); /* the name it had before driver 535 */
    *reasons = number_of(section_of(device), "clocks_event_reasons", 0);
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *celsius)
{
    ENTER_DEVICE(device);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = (unsigned int)number_of(section_of(device), "temperature_c", 45);
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_DEVICE(device);
    *milliwatts = (unsigned int)number_of(section_of(device), "power_mw", 520000);
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *percent)
{
    ENTER_DEVICE(device);
    percent->gpu = (unsigned int)number_of(section_of(device), "utilization_percent", 97);
    percent->memory = (unsigned int)number_of(section_of(device), "memory_utilization_percent", 40);
    return SUCCESS;
}

PUBLIC nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, void *infos)
{
    (void)infos;
    ENTER_DEVICE(device);
    *count = 0; /* the jobs here run on CPUs */
    return SUCCESS;
}
