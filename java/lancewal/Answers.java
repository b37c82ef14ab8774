package lancewal;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import net.razorvine.pickle.IObjectConstructor;
import net.razorvine.pickle.Unpickler;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceReadInfo;

/** Finds rows in a plan that Python made: the pickle of the one partition has them. */
final class Answers {
  private static final String MODULE = "lancewal.spark.merged";
  private static final String CLASS = "AnsweredPartition";
  /** The name stands at the beginning of the pickle. */
  private static final int HEAD = 100;

  static {
    IObjectConstructor stream = arguments -> arguments[0];
    Unpickler.registerConstructor(MODULE, CLASS, stream);
  }

  private Answers() {}

  /** The Arrow stream of all rows; null where tasks have to read them. */
  static byte[] streamOf(PythonDataSourceReadInfo plan) {
    if (plan.partitions().length() != 1) {
      return null;
    }
    byte[] pickled = plan.partitions().head();
    int length = Math.min(pickled.length, HEAD);
    if (!new String(pickled, 0, length, StandardCharsets.ISO_8859_1).contains(CLASS)) {
      return null;
    }
    try {
      return (byte[]) new Unpickler().loads(pickled);
    } catch (IOException error) {
      throw Refusals.sneaky(error);
    }
  }
}
